"""The REST dialect of the public `archil` client (0.18.0), so that it works unchanged. `routes.router` has it all."""
