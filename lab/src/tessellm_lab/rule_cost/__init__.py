"""What the default rule costs beside Eq. 2."""
