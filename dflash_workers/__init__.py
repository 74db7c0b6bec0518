"""Workers: queue -> SGLang -> S3; and the contract that producer and trainer share with them."""
