"""Parts that several tests share: servers, stand-in workers, engines, made data."""
