"""Several servers, or several models, behind one address: the gateway and the hosting of model sets."""
