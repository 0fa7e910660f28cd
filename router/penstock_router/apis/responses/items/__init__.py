"""Items of conversations: what they are, how they are read, and the messages made of them."""
