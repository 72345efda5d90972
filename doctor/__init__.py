"""`declutr doctor`: is this machine, or this cluster, fit for a run, and what is to be mended?

Facts are gathered on the nodes (facts.py, exposure.py, storage.py, collective.py); what they mean is decided by pure
functions on them (judgement.py and the `judge` functions beside the facts), one check each.
"""
