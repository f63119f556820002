// `Store`: the conversations, kept in this browser (IndexedDB) and nowhere else. In memory if the browser keeps nothing.

export class Store {
  /** @type {Map<string, object>} all conversations by id */
  conversations = new Map();

  /** @param {() => void} onLost called once if conversations cannot be kept, for example in a private window */
  constructor(onLost) {
    this._onLost = onLost;
    this._database = null;
  }

  async open() {
    try {
      this._database = await new Promise((resolve, reject) => {
        const opening = indexedDB.open("inflight", 1);
        opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
        opening.onsuccess = () => resolve(opening.result);
        opening.onerror = () => reject(opening.error);
      });
      const kept = await this._run("readonly", (place) => place.getAll());
      for (const conversation of kept) this.conversations.set(conversation.id, conversation);
    } catch {
      this._lose();
    }
  }

  async put(conversation) {
    this.conversations.set(conversation.id, conversation);
    await this._write((place) => place.put(conversation));
  }

  async remove(id) {
    this.conversations.delete(id);
    await this._write((place) => place.delete(id));
  }

  /** Those whose title or messages contain all words of `text`, the newest first. */
  found(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (conversation) => {
      const own = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)].join("\n").toLowerCase();
      return words.every((word) => own.includes(word));
    };
    return [...this.conversations.values()].filter(fits).sort((a, b) => b.updated - a.updated);
  }

  async _write(work) {
    if (this._database === null) return;
    try {
      await this._run("readwrite", work);
    } catch {
      this._lose();
    }
  }

  _run(mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this._database.transaction("conversations", mode);
      const request = work(transaction.objectStore("conversations"));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }

  _lose() {
    this._database = null;
    this._onLost();
  }
}
