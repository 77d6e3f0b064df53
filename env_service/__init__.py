"""Environments, graders and the sandbox for tenants' code: messages in, messages out."""
