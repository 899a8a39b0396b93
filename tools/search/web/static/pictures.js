// The pictures of one answer, fetched in their order.

const AT_ONCE = 4; // of a browser's six connections to a server; the rest stay free for searches
const PATIENCE = 30000; // ms of retries while the server answers 503

// A request that is repeated while the server is too busy.
export async function patiently(source, options) {
  const end = Date.now() + PATIENCE;
  for (;;) {
    const response = await fetch(source, options);
    if (response.status !== 503 || Date.now() > end) return response;
    await new Promise((wake) => setTimeout(wake, 1000 * (Number(response.headers.get("Retry-After")) || 1)));
    options.signal.throwIfAborted();
  }
}

export class Pictures {
  ended = new AbortController();
  waiting = [];
  loading = 0;
  done = 0;
  all = 0;

  // `progress` is called with the numbers of pictures that are there, and of all.
  constructor(progress) {
    this.progress = progress;
  }

  load(...picture) {
    this.all++;
    this.waiting.push(picture);
    this.next();
  }

  stop() {
    this.waiting = [];
    this.ended.abort();
  }

  next() {
    if (this.loading >= AT_ONCE || !this.waiting.length) return;
    this.loading++;
    this.put(...this.waiting.shift()).finally(() => {
      this.loading--;
      this.done++;
      if (!this.ended.signal.aborted) this.progress(this.done, this.all);
      this.next();
    });
  }

  async put(image, source, description) {
    try {
      const response = await patiently(source, { signal: this.ended.signal });
      if (response.ok) {
        image.src = URL.createObjectURL(await response.blob());
        image.alt = description;
        await image.decode().finally(() => URL.revokeObjectURL(image.src));
      } else image.replaceWith(response.status === 503 ? "The server is too busy for this picture." : "The picture is missing.");
    } catch {
      if (!this.ended.signal.aborted) image.replaceWith("The picture is missing.");
    }
  }
}
