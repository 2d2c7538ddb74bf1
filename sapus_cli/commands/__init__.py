"""One command a file: each reads its options, builds a config, calls, and prints."""
