"""The objectives: one file each. To add one, write its file; its config goes to trainer/objective_settings.py."""

from trainer.objective_settings import DeclutrConfig, ObjectiveConfig
from trainer.objectives.declutr import Declutr

__all__ = ["Declutr", "DeclutrConfig", "ObjectiveConfig"]
