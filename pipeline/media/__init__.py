"""Rows of images and audio: decoding, labels, conversion to what the shards hold."""
