"""`penstock translate`: command lines of other servers as those of penstock."""
