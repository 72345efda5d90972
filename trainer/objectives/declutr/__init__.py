"""DeCLUTR: spans of documents, NT-Xent over the global batch, masked language modelling."""
