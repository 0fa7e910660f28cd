"""Finds out what messages a chat template takes, and makes chats fit it."""
