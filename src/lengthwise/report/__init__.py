"""What a person reads: figures with units, histograms, tables and the live line. Pure: text in, text out."""
