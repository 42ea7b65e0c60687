"""What every Forebay service shares: config, errors, servers, discovery, telemetry."""
