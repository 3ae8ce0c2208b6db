"""The command line: one file per subcommand, none of which imports another."""
