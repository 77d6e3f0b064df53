"""A whole MARLaaS on one machine: `marlaas up`."""
