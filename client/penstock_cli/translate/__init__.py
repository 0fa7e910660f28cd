"""`penstock translate`: turns command lines of other servers into penstock's."""
