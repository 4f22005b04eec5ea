"""The gate: what may happen, asked once, inside the write transaction, of the one fold.

A call is described beforehand by values only (`question`); `pipeline.judge` puts it to switch, breaker, limits, rules,
locks and approvals, in that order, and the answer is facts. A refusal debits nothing and wakes nobody.
"""
