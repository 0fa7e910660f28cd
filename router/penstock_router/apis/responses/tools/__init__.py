"""Tools of bodies, the functions that stand for them, and the choice among them."""
