"""List scheduling of moldable tasks: rings onto the line of ranks, short sequences into packs that level the ends."""
