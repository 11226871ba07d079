"""`syncstack bench`: what this machine and this container give, beside the ways that others take and a floor."""
