"""Records only: sequences, clusters, shapes, plans, and the error tree. Imports nothing of the package but itself."""
