/* User namespaces that map a range of ids, not one alone. */
#ifndef WF_IDS_H
#define WF_IDS_H

/* Puts the caller, which has one thread, into a user namespace of its own with
 * the map of `shared`, a descriptor of a namespace that the caller's user made
 * and that is closed here. Drops the supplementary groups. Dies with a
 * report. */
void ids_unshare(int shared);

#endif
