"""What a person reads: figures with units, histograms, tables and the live line; text in, text out."""
