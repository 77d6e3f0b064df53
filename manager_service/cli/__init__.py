"""The command line, `marlaas`. It talks HTTP alone, but for `up`, which runs the supervisor."""
