"""How the router's signal and its constants were chosen: a cache of features, and the fit."""
