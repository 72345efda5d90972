"""Supervised contrastive learning of images and sounds."""
