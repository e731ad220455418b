"""What nobody can beat: the clairvoyant optimum, valid bounds, and what is known only afterwards."""
