"""Why a request took as long as it did, told from the step log."""
