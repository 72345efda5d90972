"""SCL: classification of premise and hypothesis with a supervised contrastive loss."""
