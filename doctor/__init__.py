"""`declutr doctor`: checks that a machine or a cluster can run a training, and names the remedies.

Facts are gathered on the nodes (facts.py, exposure.py, storage.py, collective.py). Pure functions judge them
(judgement.py and the `judge` functions next to the facts), one check each.
"""
