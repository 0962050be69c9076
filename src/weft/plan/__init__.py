"""The plan that ranks execute: how a model is cut, laid out on devices and fitted into their memory."""
