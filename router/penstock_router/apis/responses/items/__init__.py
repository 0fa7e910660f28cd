"""Items of conversations: their types, how they are read, and the messages made of them."""
