"""The update strategies that ship with sapus, one a file."""

REGISTRY: dict[str, str] = {
    "adacomm": "strategies.adacomm:AdaComm",
    "adpsgd": "strategies.adpsgd:AdpSgd",
    "asp": "strategies.asp:Asp",
    "bsp": "strategies.bsp:Bsp",
    "dc-asgd": "strategies.dc_asgd:DcAsgd",
    "diloco": "strategies.diloco:DiLoCo",
    "dssp": "strategies.dssp:Dssp",
    "easgd": "strategies.easgd:Easgd",
    "fedasync": "strategies.fedasync:FedAsync",
    "fedbuff": "strategies.fedbuff:FedBuff",
    "lag": "strategies.lag:Lag",
    "local-sgd": "strategies.local_sgd:LocalSgd",
    "local-sgd-async": "strategies.local_sgd_async:LocalSgdAsync",
    "post-local-sgd": "strategies.post_local_sgd:PostLocalSgd",
    "sapus": "strategies.sapus:Sapus",
    "sapus-weighted": "strategies.sapus_weighted:SapusWeighted",
    "selsync": "strategies.selsync:SelSync",
    "ssp": "strategies.ssp:Ssp",
}
"""Name on the command line -> "module:class". Text, so that looking a name up imports nothing."""
