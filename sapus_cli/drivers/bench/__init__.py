"""Measures what carries vectors: bare ZeroMQ loops, the whole server, other libraries, and this machine's ceilings.

`plan` says what is measured and is free of torch; `team` starts processes and measures; what runs in them lies in
`child`, `ceilings`, `bare`, `full` and `peers`. `docs/performance.md` describes the method.
"""
