"""Facts and their file: what was acknowledged is there, in the order it happened, and an altered bit is found.

One append-only log per device, in one SQLite file. A decision runs inside the write transaction against the fold of
everything before it; what it answers is written whole or not at all. The room knows bytes, hashes, signatures and
boots, and nothing of what the facts are about; it imports no other room.
"""
