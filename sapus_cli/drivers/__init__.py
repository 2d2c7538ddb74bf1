"""What drives the cores: real processes over ZeroMQ."""
