"""The part of OpenEnv that servers use."""
