"""Export of encoders to smaller and faster forms, measured when they are made."""
