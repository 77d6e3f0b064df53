"""The built-in environments, and how a message's environment is made."""
