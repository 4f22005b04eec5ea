"""How logs meet: devices that pair, compare frontiers and take over each other's verified records.

Empty in this release. What is fixed already is the arrow: this room may import the store, never the runtime, since it
moves records that it need not understand.
"""
