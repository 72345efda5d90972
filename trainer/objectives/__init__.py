"""The objectives: one file each. To add one, write its file and add its config to the union here."""

from trainer.objectives.declutr import Declutr, DeclutrConfig

ObjectiveConfig = DeclutrConfig

__all__ = ["Declutr", "DeclutrConfig", "ObjectiveConfig"]
