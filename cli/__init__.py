"""Doors for people: every command parses, opens the log, makes one commit or one fold, and says what came of it."""
