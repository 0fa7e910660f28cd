"""Messages made to fit a chat template: what it takes, and what becomes of a chat for it."""
