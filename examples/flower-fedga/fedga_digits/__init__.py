"""FedGA on handwritten digits with Flower."""
