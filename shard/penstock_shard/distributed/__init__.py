"""One model over several devices: a process for each, all of which compute every step."""
