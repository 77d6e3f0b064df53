"""Generates turns: many jobs' rollouts, evaluations and chats at once on one base model, each with its own adapter."""
