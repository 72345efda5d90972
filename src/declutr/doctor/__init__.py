"""`declutr doctor`: checks that a machine or a cluster can run a training, and names the remedies.

Facts are gathered on the nodes (facts.py, network.py, storage.py, collective.py). Pure functions judge them
(checks.py and the `check` functions next to the facts), one check each.
"""
