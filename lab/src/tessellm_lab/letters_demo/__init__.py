"""What `tessellm demo letters` does: small experts that it trains, their composition, a picture and a report."""
