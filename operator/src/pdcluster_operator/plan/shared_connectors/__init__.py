"""The ConfigMaps with the connector, which the clusters of a namespace share."""
