"""SCD: self-contrast of two dropout rates and decorrelation of dimensions."""
