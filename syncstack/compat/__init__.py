"""Parts that make other people's code work in locked-down containers, as it is."""
