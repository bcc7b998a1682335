"""How a run goes on when ranks are lost, leave or join."""
